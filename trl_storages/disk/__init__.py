"""Rows in a directory: one writer, any number of readers; no live row is ever overwritten.

Letters: E lanes (environments), T live steps per lane at most, S spare steps, R = T + S, W words a row,
X words of a row that are shared.

A lane has R slots for at most T live steps, so a write only goes to slots that hold no live row. Two
tables in `commits` take turns in recording which rows are live; a selector word picks the current one.
Step numbers never restart.

    storage.json        replaced by a rename: layout, cursors of the last flush, `is_clean`
    storage.G.rows      int64 words; each of its parts begins a page:
        rows            [R E, W] one transition a row
        marks           [R E, 2] mark and checksum of each row
        commits         the selector, a number that openings to write change, odd while one verifies
                        the rows, and two tables of the count of writes, and cursors, tails, flags and
                        trajectories of the lanes
        priorities      [R E + 1] a float32, a check of it and the mark; zeros until a sampler keeps them
        side            [*, X + 1] if rows share next observations: those stored in no row, as X
                        words, and a checksum of them, and checksum and slot of the row that names
                        them
    lock                flock of the one writer

A write is `begin` (clears marks), the rows, then `seal` (checksums and priorities, then marks, then the
other table, then the selector). A writer killed at any point leaves a consistent state: that before its
write, or that after it.

                  create                     first write: not `is_clean`
    (nothing) ------------> CLEAN, no rows ------------------------+
                              ^                                    v
       close: flush, clean    |                                WRITTEN ----+ write, evict, load,
                              +----------------------------------+  ^ ^     | flush: rows, then
                                                                    | +-----+ storage.json
                        open: every row is checked                  |
                        (killed, or power cut) ---------------------+

    CLEAN     as storage.json says: the selected table is trusted, its rows are indexed by their marks
    WRITTEN   everything is verified by checksum: the selected table is valid if all its rows are intact;
              otherwise each lane keeps the run of intact rows around the last flushed one, and the
              storage gets a new identity
    load      fills a file of generation G + 1 beside the old one; one rename switches to it

What a killed or failed writer left beyond the last commit is durably removed before anything is written
there: so leftovers are never taken for current rows, whatever a power loss keeps.

The next observation of a row is found through the row after it, so a row never changes once it is written
(see `kernels.sharing`). An entry of the side table belongs to the row that names it until that row's slot
is rewritten. The newest row of a lane has a tip there, which may be reused two writes later; the tip of
the row that was the newest at the last flush is kept until the next flush. On opening, the free entries
are worked out from the valid rows: readers that still know evicted ones notice that it was opened, and
read again. As a reader may not have seen an eviction yet, a new row links an evicted row before it too.

The side table is a hole in the file: its space on disk is reserved as entries are used.

Rows that store single frames are read with the frames of up to D rows before them in their episode. So S
is larger by D, and the D steps before the oldest live row of a lane stay in the ring until it is evicted:
they are checked, followed and recovered with it, and a write of more than T steps writes them in full,
since a power loss may make them live again. A row is valid only if all its frames are intact.

Readers map the same files. They follow the tables, draw, gather, and check the marks again: if a row was
overwritten meanwhile, they draw again. A tip is read only while its row is the newest committed one.
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
