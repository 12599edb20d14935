"""Parsers for the reasoning that models write before their response, one file per format."""
