"""What one chapter alone needs, a module each."""
