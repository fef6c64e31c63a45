#define _GNU_SOURCE
#include "beneath.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* As in <linux/openat2.h>, which older systems lack: since Linux 5.6, the same number everywhere. */
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
struct how {
    uint64_t flags, mode, resolve;
};
enum { NO_SYMLINKS = 0x04 };

static bool is_link(int directory, const char *name)
{
    struct stat info;
    return fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
}

/* Whether a kernel or a sandbox may refuse openat2 itself: sandboxes answer as they are told to. Where it is the
 * directory that was refused, the walk is refused too. */
static bool is_refused(int error)
{
    return error == ENOSYS || error == EPERM || error == EACCES || error == EINVAL || error == EOPNOTSUPP;
}

/* One name after the other: five calls for one. */
static int walk(int root, const char *below, int flags)
{
    int at = root;
    for (;;) {
        size_t nbytes = strcspn(below, "/");
        char name[NAME_MAX + 1];
        if (nbytes > NAME_MAX) {
            errno = ENAMETOOLONG;
            break;
        }
        memcpy(name, below, nbytes);
        name[nbytes] = '\0';
        bool last = below[nbytes] == '\0';
        int fd = openat(at, name, (last ? flags : O_PATH) | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 && errno == ENOTDIR)
            errno = is_link(at, name) ? ELOOP : ENOTDIR;
        int failed = errno;
        if (at != root)
            close(at);
        errno = failed;
        if (last || fd < 0)
            return fd;
        at = fd;
        below += nbytes + 1;
    }
    int failed = errno;
    if (at != root)
        close(at);
    errno = failed;
    return -1;
}

int open_beneath(const char *path, size_t root_nbytes, size_t nbytes, int flags)
{
    char copy[PATH_MAX];
    if (nbytes >= sizeof copy) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(copy, path, nbytes);
    copy[nbytes] = '\0';
    flags |= O_DIRECTORY | O_CLOEXEC;
    if (root_nbytes >= nbytes)
        return open(nbytes ? copy : "/", flags);
    struct how how = {.flags = (uint64_t)flags, .resolve = NO_SYMLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, copy, &how, sizeof how);
    if (fd >= 0 || (errno != ELOOP && !is_refused(errno)))
        return fd;
    /* There is a link, which may be the root's; or openat2 is refused. */
    copy[root_nbytes] = '\0';
    int root = open(root_nbytes ? copy : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return -1;
    /* Relative, however many slashes there are: an absolute path would lead out of the root. */
    const char *below = copy + root_nbytes + strspn(copy + root_nbytes + 1, "/") + 1;
    if (*below == '\0')
        below = ".";
    fd = (int)syscall(SYS_openat2, root, below, &how, sizeof how);
    if (fd < 0 && is_refused(errno))
        fd = walk(root, below, flags);
    int failed = errno;
    close(root);
    errno = failed;
    return fd;
}
