"""What loading does to a file until it is a `Model`: reading, cleaning, folding, static shapes."""
