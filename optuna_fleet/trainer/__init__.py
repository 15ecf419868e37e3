"""What runs on a device."""
