"""From journals to tables and plots."""
