/* One chunk file, written or read in one go. Knows nothing of Python: called without the interpreter's lock.
 *
 * What is here is only the way on which all goes well. Whatever else is found (a file that is missing, bad,
 * foreign, or a disk that says no) ends it, and fskv/data_path/store.py does that chunk again from the start: the
 * judgement, the repair and the words are there and only there. What is taken here is taken there too
 * (tests/unit/test_readers_agree.py).
 */
#ifndef FSKV_CHUNK_IO_H
#define FSKV_CHUNK_IO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "crypto.h"

enum { ROW = 65536 };
enum { NAME = 32, SHARD = 3 }; /* digits in a chunk's name, and of these in its directory's */

/* What all files of a group have in common; docs/format.md. The header's map is made of these pieces:
 * `head`, the key, `middle`, first_block, `rows`, the digests, `tail`, written_at. */
typedef struct {
    const char *head, *middle, *rows, *tail;
    ssize_t head_nbytes, middle_nbytes, rows_nbytes, tail_nbytes;
    size_t header_nbytes, payload_nbytes, content_nbytes, block_nbytes;
    unsigned format_version, num_blocks;
    int open_flags; /* O_DIRECT or 0 */
    int fsync;
    int touch; /* a file that was published: fskv.root.filesystem.shows_late */
    mode_t file_mode, dir_mode;
    double touch_interval_s;
    ssize_t root_nbytes;            /* of the paths: no link is followed in what is behind them */
    const char *directory, *suffix; /* of shards, and what follows the digits in a name */
    ssize_t directory_nbytes, suffix_nbytes;
    RowsOf sealed; /* its keys and context; no keys: in clear, else a seal and tags are where the digests would be */
} FileLayout;

typedef struct {
    const char *path, *part;
    const uint8_t *key;
    size_t key_nbytes;
    uint32_t first_block, num_blocks; /* wanted blocks of a load; a store begins at first_block */
    int replace;                      /* store: what is there is suspect */
    int64_t *use_ns;                  /* see stamp_use; NULL: nobody has said who uses it */
    uint32_t depth;                   /* in its prefix */
} ChunkFile;

/* CHUNK_SPOILT: libcrypto failed, and what is in the slot is of no use to anybody. */
typedef enum { CHUNK_OK, CHUNK_EXISTS, CHUNK_OTHERWISE, CHUNK_SPOILT } ChunkResult;

/* The digest of each 64 KiB row, 8 bytes a row, big endian; the last row may be short. */
void digest_rows(const uint8_t *data, size_t nbytes, uint8_t *digests);
size_t num_rows(size_t nbytes);
/* The length of what a header has for its rows: the digests, or the seal and the tags. */
size_t rows_field_nbytes(const FileLayout *layout);

/* Where the digests of a chunk's rows belong in its header. */
uint8_t *row_digests_in(const FileLayout *layout, const ChunkFile *file, uint8_t *slot);

/* Write the slot, whose content was gathered, as a part and publish it. `digested`: what is not content is
 * zero, and the digests are in their place. On CHUNK_OTHERWISE the content is in the slot as it was. */
ChunkResult chunk_write(const FileLayout *layout, const ChunkFile *file, uint8_t *slot,
                        bool digested);

/* Read and check the wanted blocks into the slot. On CHUNK_OK *fd is open and *old_mtime says if it wants a touch. */
ChunkResult chunk_read(const FileLayout *layout, const ChunkFile *file, uint8_t *slot, int *fd,
                       int *old_mtime);

/* Give a file the time of a use: a millisecond earlier for each chunk before it in its prefix, so that the deepest
 * goes first. `use_ns` is shared by the files of a use: the first of them to be stamped by the file system says when it
 * was, 0 before. No clock of ours is asked. A file that is younger stays so, unless it was stamped just now: `fresh`.
 * One of a time to come does not. `fd` is of its directory, or of the file where `name` is NULL. Where no other
 * time than now may be set (another user's file) it is now. */
void stamp_use(int fd, const char *name, int64_t *use_ns, uint32_t depth, bool fresh);

/* Open the directory that the first `nbytes` of `path` name. Links are followed in the first `root_nbytes` of
 * them, the root, and nowhere after: ELOOP. -1 and errno when it cannot be opened. */
int open_beneath(const char *path, size_t root_nbytes, size_t nbytes, int flags);

double realtime_s(void);

#endif
