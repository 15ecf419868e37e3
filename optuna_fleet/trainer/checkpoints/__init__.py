"""What is kept of a trial, and put back."""
