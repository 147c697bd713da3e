"""Parts of the storage on streams of observations, until they take the place of the old ones."""
