"""Ways of having ranks, one a file."""
