"""The gate: everything that has to be green before a change lands, by `.ci/run`. docs/testing.md has what it runs."""
