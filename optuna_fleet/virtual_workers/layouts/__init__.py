"""Replicas x stages: how a trial uses several, possibly unlike, devices (HetPipe, section 8.1)."""
