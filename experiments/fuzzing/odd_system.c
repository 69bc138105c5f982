/* A system that is odd in one way, by its environment:
 *
 *   ODD_JUMP_S=3600   the time of day is so many seconds ahead in every second tenth of a second
 *   ODD_LOCKS=37      flock fails with that errno, as on file systems without locks (ENOLCK)
 *   ODD_FULL=PATH     below that path the disk is full after
 *   ODD_WRITES=5      so many writes of a process
 *
 * cc -shared -fPIC -o odd_system.so odd_system.c -ldl, then LD_PRELOAD=…/odd_system.so
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long jump(void) {
    const char *seconds = getenv("ODD_JUMP_S");
    struct timespec now;
    if (!seconds) return 0;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now);
    return now.tv_nsec / 100000000 % 2 ? atol(seconds) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += jump();
    return failed;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}

int flock(int file, int how) {
    const char *reason = getenv("ODD_LOCKS");
    if (reason) {
        errno = atoi(reason);
        return -1;
    }
    return syscall(SYS_flock, file, how);
}

/* Whether there is no room any more for this write. */
static int full(int file) {
    static long written;
    const char *where = getenv("ODD_FULL"), *most = getenv("ODD_WRITES");
    char link[64], path[4096];
    if (!where || !most) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    if (strncmp(path, where, strlen(where))) return 0;
    if (__atomic_fetch_add(&written, 1, __ATOMIC_RELAXED) < atol(most)) return 0;
    errno = ENOSPC;
    return 1;
}

ssize_t write(int file, const void *data, size_t size) {
    return full(file) ? -1 : syscall(SYS_write, file, data, size);
}

ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return full(file) ? -1 : syscall(SYS_pwrite64, file, data, size, at);
}

ssize_t pwrite64(int file, const void *data, size_t size, off_t at) {
    return full(file) ? -1 : syscall(SYS_pwrite64, file, data, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    return full(file) ? -1 : syscall(SYS_writev, file, parts, count);
}
