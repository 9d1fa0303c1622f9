"""Front ends for users of other tools: ModelOpt's autotune, TAO spec files."""
