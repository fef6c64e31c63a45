/* Chunk files seen from outside: are they there? Opens none of them. Knows nothing of Python: called without the
 * interpreter's lock, on threads that may hang with the mount.
 *
 * Names are those of docs/format.md, "Names of chunk files": `<directory>/<3 hex>/<32 hex><suffix>`. All of their
 * pieces come from fskv.namespace.
 */
#ifndef FSKV_FILES_H
#define FSKV_FILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { NAME = 32, SHARD = 3 }; /* digits in a chunk's name, and of these in its directory's */

/* Where shards are. `fd` makes a look 1.6 times faster than a whole path (ext4, 9 components: 1180 against 745
 * thousand a second; statx with a narrow mask gained nothing); -1: whole paths. */
typedef struct {
    const char *path;
    size_t path_nbytes;
    int fd;
} ShardsDir;

/* One rank's file of a group. */
typedef struct {
    const char *suffix;
    size_t suffix_nbytes;
    int64_t nbytes;
} RankFile;

void shards_open(ShardsDir *directory);
void shards_close(ShardsDir *directory);

/* Look whether all of a chunk's files are there with their sizes: 1, 0, or the negative errno of the first that
 * cannot be looked at. `missed_before`: see fskv.index.presence.probe_chunks. `path` has
 * room for the longest path and a zero: path_nbytes + 37 + suffix_nbytes + 1. */
int probe_chunk(const ShardsDir *directory, const RankFile *files, size_t num_files, const char name[NAME],
                bool missed_before, char *path);

#endif
