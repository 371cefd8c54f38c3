"""Whole protocols, which run the user's command themselves: two revisions to a verdict; recorded against bare."""
