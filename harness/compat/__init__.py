"""Front ends for users of other tools: ModelOpt's autotune, TAO spec files.

May import every package but `cli`, whose progress display alone it shares.
Must not add behaviour that `qdq run` lacks.
"""
