-- $mark: see stage.py
comment on schema fenceguard is '$mark';
