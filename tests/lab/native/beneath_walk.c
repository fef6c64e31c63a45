/* csrc/beneath.c where the kernel has no openat2: what a system call of that number answers is ENOSYS. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#undef SYS_openat2
#define SYS_openat2 9999
#include "../../../fskv/csrc/beneath.c"
