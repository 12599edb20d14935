"""The console: one page about the fleet, and the data it and `dynamo-local top` show."""
