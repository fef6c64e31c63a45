/* open_beneath of csrc/chunk_io.c. With REFUSED openat2 is refused: that is what a kernel or a sandbox answers. */
#define _GNU_SOURCE
#include <errno.h>
#include <unistd.h>
#ifdef REFUSED
static long refused(void)
{
    errno = REFUSED;
    return -1;
}
#define syscall(...) refused()
#endif
#include "../../../fskv/csrc/chunk_io.c"
#include "../../../fskv/csrc/crypto.c"
#include "../../../fskv/csrc/xxh3.c"
