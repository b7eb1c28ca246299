"""Other projects as their users call them, for the rivals of a step (models.rivals) and of a layer (models.quickstart)."""
