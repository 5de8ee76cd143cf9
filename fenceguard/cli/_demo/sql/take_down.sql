-- $schema, $resource: as in put_up.sql
select fenceguard.drop_fence('$schema.account');
drop schema $schema cascade;
delete from fenceguard.fence where starts_with(resource, '$resource:');
