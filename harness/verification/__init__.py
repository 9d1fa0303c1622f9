"""Checks of exported models: right results, dynamic axes, reproduction of recorded figures."""
