"""Studies of searchers and of measuring itself: replay tables, their landscapes, components of noise."""
