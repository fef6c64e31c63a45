/* Directories of a root, reached through no symbolic link below it. Knows nothing of Python. */
#ifndef FSKV_BENEATH_H
#define FSKV_BENEATH_H

#include <stddef.h>

/* Open the directory that the first `nbytes` of `path` name. Links are followed in the first `root_nbytes` of
 * them, the root, and nowhere after: ELOOP. -1 and errno when it cannot be opened. */
int open_beneath(const char *path, size_t root_nbytes, size_t nbytes, int flags);

#endif
