"""Rows of streams, field by field."""


def fill(layout, key, rows, values):
    """Copies values `[N, *shape]` of a field into rows `[N, row_words]`."""
    field = layout.by_key[key]
    if field.stack is None:
        layout.views(rows)[key].copy_(values)
    else:
        layout.frames_of(field, rows).copy_(field.stack.frames(values, field.shape))
