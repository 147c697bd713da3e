"""Rows in a directory: one writer, any number of readers, and no live row is ever overwritten.

Letters: E lanes (environments), T live steps a lane at most, S spare steps, R = T + S, W words a row.

A lane has R slots for T live steps, so that a write goes to slots that hold no live row. What is live is
said by one of two tables in `commits`; a selector word says which. Steps never start again.

    storage.json        written anew and renamed: layout, histories, what was flushed last, `clean`
    rows.G.bin          [R E, W]  int64, each a transition
    marks.G.bin         [R E, 2]  int64, mark and checksum of each row
    commits.G.bin       the selector, and two tables of cursors, tails and flags of the lanes
    priorities.G.bin    [R E + 1] int64, if a sampler keeps some: a float32, a check over it and the mark
    lock                flock of the one writer

A write is `begin` (marks away), rows, `seal` (checksums and priorities, marks), then `commit` (the other
table, the selector): a killed writer leaves what was committed before it or after it, whole.

                  create                     first write: a history
    (nothing) ------------> CLEAN, no rows ------------------------+
                              ^                                    v
       close: flush, clean    |                                WRITTEN ----+ write, evict, load,
                              +----------------------------------+  ^ ^     | flush: rows, then commits,
                                                                    | +-----+ then storage.json
                        open: every row is looked at                |
                        (killed, or power cut) ---------------------+

    CLEAN     storage.json says so: the selected table is trusted, its rows are taken in by their marks
    WRITTEN   everything is looked at by checksum: the selected table counts if each of its rows is whole;
              otherwise, lane by lane, the run of whole rows around the last one that was flushed
    load      files of generation G + 1 are filled beside the old ones, and one rename switches

Each open for writing, and each load, has a number, its history; rows carry it, and count only if no later
history owns their step: what a killed writer left behind is never taken for a row of today.

Readers map the same files. They follow the tables, draw, gather, and look at the marks once more: a row
that was not there while it was read is drawn anew.
"""

from trl_storages.disk.description import holds_storage, spare_steps
from trl_storages.disk.directory import Directory
from trl_storages.disk.reader import Reader

__all__ = [
    "Directory",
    "Reader",
    "holds_storage",
    "spare_steps",
]
