/* Digests of what comes in, for test_processors.py: the sources that hash, built for some processor and run. */
#include <stdio.h>
#include <stdlib.h>

#include "xxh3.h"

enum { ROW = 65536, MOST = 1 << 24 };

int main(void)
{
    uint8_t *data = malloc(MOST);
    size_t nbytes = data ? fread(data, 1, MOST, stdin) : 0;
    xxh3_init();
    for (size_t at = 0; at < nbytes; at += ROW) {
        size_t length = nbytes - at < ROW ? nbytes - at : ROW;
        printf("%016llx\n", (unsigned long long)xxh3_64(data + at, length));
    }
    for (size_t length = XXH3_MIN_NBYTES; length < 700; length++) /* at odd addresses too */
        printf("%016llx\n", (unsigned long long)xxh3_64(data + length, length));
    return nbytes ? 0 : 1;
}
