"""What everything that sends over the network shares: deadlines, and how it connects."""
