"""The processes of a command: starting them, meeting, and what they find on their hosts."""
