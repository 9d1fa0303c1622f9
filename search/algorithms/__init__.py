"""The searchers that come with qdq-bench, one per file; they never import each other."""
