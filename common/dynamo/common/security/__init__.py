"""Who may do what: API keys and their limits, what is protected, certificates, and files that are read anew when they change."""
