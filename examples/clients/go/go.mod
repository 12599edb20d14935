module example.org/dynamo-client

go 1.19
