"""What `preflight` looks at before any tensor is traced."""
