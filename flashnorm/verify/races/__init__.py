"""Races between streams: found by logic on any machine, and by widening their windows on a GPU."""
