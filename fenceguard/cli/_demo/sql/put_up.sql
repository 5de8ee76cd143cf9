-- $schema, $resource: made of random letters. First what needs a right that the role may lack, so that it shows before anything is made.
delete from fenceguard.fence where starts_with(resource, '$resource:');
create schema $schema;
create table $schema.account (id bigint primary key, balance bigint not null);
create table $schema.account_without_fence (id bigint primary key, balance bigint not null);
insert into $schema.account values ($account_id, $start);
insert into $schema.account_without_fence values ($account_id, $start);
select fenceguard.add_fence('$schema.account', '$resource:{id}', 'enforce');
