select balance from $schema.$table where id = $account_id;
