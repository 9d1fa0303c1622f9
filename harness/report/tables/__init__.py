"""Tables with columns, captions and notes."""
