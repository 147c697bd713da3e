"""Rows in a directory: one writer, any number of readers, and no live row is ever overwritten.

Letters: E lanes (environments), T live steps a lane at most, S spare steps, R = T + S, W words a row.

A lane has R slots for T live steps, so that a write goes to slots that hold no live row. What is live is
said by one of two tables in `commits`; a selector word says which. Steps never start again.

    storage.json        written anew and renamed: layout, histories, what was flushed last, `clean`
    rows.G.bin          [R E, W]  int64, each a transition
    marks.G.bin         [R E, 2]  int64, mark and checksum of each row
    side.G.bin          [*, S + 1] int64, if rows share next observations: those that lie in no row, of S
                        words, and a checksum over them, mark and slot of the row that names them
    commits.G.bin       the selector, and two tables of cursors, tails and flags of the lanes
    priorities.G.bin    [R E + 1] int64, if a sampler keeps some: a float32, a check over it and the mark
    lock                flock of the one writer

A write is `begin` (marks away), rows, then `seal` (checksums and priorities, marks, the other table, the
selector): a killed writer leaves what was committed before it or after it, whole.

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

What is next of a row is said by the row after it, so that no row is ever changed (see
`kernels.sharing`). An entry of the side table belongs to the row that names it until the slot of this
row is written anew. The newest row of a lane has a tip there, which two writes later may hold what is
next of another row; that of the row which was the newest when all was flushed last stays until the next
flush. Which entries are free is found out from the rows that count, at opening. The file is sparse: it
takes space as entries are used. What is next of rows that were evicted or emptied is said all the same,
by the slot after them if there is no row: a reader may not have heard of it yet.

Rows that hold single frames are seen with those of up to D rows before them in their episode. So S is
larger by D, and the D steps before the oldest live row of a lane stay in the ring until it is evicted:
they are checked, followed and recovered with it, and written whole by a write of more than T steps, since
a loss of power may make them count again. A row whose frames are not all whole does not count.

Readers map the same files. They follow the tables, draw, gather, and look at the marks once more: a row
that was not there while it was read is drawn anew. A tip is read only while its row is the newest that
was committed.
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
