"""Checks of exported models: accuracy, right results, faulty operators, dynamic axes."""
