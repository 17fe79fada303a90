"""What a private step costs: bytes held and time spent."""
