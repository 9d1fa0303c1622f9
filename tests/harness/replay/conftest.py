from made_up_tables import make_table

__all__ = ["make_table"]
