"""Alerts: what changed about an incident, told to people and machines, at least once each."""
