"""Certificates, and files that are read again when they change."""
