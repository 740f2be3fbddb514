/* LD_PRELOAD library that disturbs a process and its forks.
 *
 * It counts the calls that change files below one folder, in all processes together. At the chosen call it kills the
 * process group (a write is half done then), or lets this and all later calls that need space fail. It can also shift
 * CLOCK_REALTIME. The parent sets `chaos_state` before it forks; without that every call goes through unchanged.
 *
 *     cc -shared -fPIC -O1 -o faults.so faults.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { COUNT = 0, KILL = 1, FAIL = 2 };

struct state {
    long count;           /* calls so far */
    long at;              /* number of the call to disturb, from 1; 0: none */
    long action;
    long error;           /* errno of FAIL */
    long clock_step;      /* seconds added to CLOCK_REALTIME */
    char folder[1024];    /* absolute; "" disables everything but the clock */
    char seen[1024];      /* the disturbed call */
};

static struct state *state;

struct state *chaos_state(void) { return state; }

__attribute__((constructor)) static void start(void) {
    state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (state == MAP_FAILED) _exit(99);
}

static int armed(void) { return state != NULL && state->folder[0] != 0; }

static int inside(const char *path) {
    size_t n = strlen(state->folder);
    return strncmp(path, state->folder, n) == 0 && (path[n] == '/' || path[n] == 0);
}

static int path_of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return 1;
}

/* Absolute form of a path relative to a folder's descriptor. */
static int path_at(int dir, const char *path, char *out) {
    char base[PATH_MAX];
    if (path == NULL) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return 1;
    }
    if (dir == AT_FDCWD) {
        if (getcwd(base, sizeof base) == NULL) return 0;
    } else if (!path_of_fd(dir, base)) {
        return 0;
    }
    return snprintf(out, 2 * PATH_MAX, "%s/%s", base, path) > 0;
}

/* Count one call. Returns 1 if it is to fail, with errno set; 2 if a write is to be half done before the kill. */
static int disturb(const char *call, const char *path, int needs_space, int is_write) {
    long number = __atomic_add_fetch(&state->count, 1, __ATOMIC_SEQ_CST);
    if (state->at == 0 || number < state->at) return 0;
    if (number == state->at) snprintf(state->seen, sizeof state->seen, "%s %s", call, path);
    if (state->action == KILL && number == state->at) {
        if (is_write) return 2;
        kill(0, SIGKILL);
        pause();
    }
    if (state->action == FAIL && needs_space) {
        errno = (int)state->error;
        return 1;
    }
    return 0;
}

static int on_path(const char *call, int dir, const char *path, int needs_space) {
    char whole[2 * PATH_MAX + 2];
    if (!armed() || !path_at(dir, path, whole) || !inside(whole)) return 0;
    return disturb(call, whole, needs_space, 0);
}

static int on_fd(const char *call, int fd, int needs_space, int is_write) {
    char whole[PATH_MAX];
    if (!armed() || !path_of_fd(fd, whole) || !inside(whole)) return 0;
    return disturb(call, whole, needs_space, is_write);
}

#define REAL(name) static __typeof__(&name) real; if (real == NULL) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...) {                                      \
        REAL(name);                                                                   \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;     \
        va_end(rest);                                                                 \
        if ((flags & CHANGES) && on_path("open", AT_FDCWD, path, flags & O_CREAT)) return -1; \
        return real(path, flags, mode);                                               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                  \
    int name(int dir, const char *path, int flags, ...) {                             \
        REAL(name);                                                                   \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;     \
        va_end(rest);                                                                 \
        if ((flags & CHANGES) && on_path("open", dir, path, flags & O_CREAT)) return -1; \
        return real(dir, path, flags, mode);                                          \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                                   \
    FILE *name(const char *path, const char *mode) {                                  \
        REAL(name);                                                                   \
        if (strpbrk(mode, "wa+") && on_path("open", AT_FDCWD, path, 1)) return NULL;  \
        return real(path, mode);                                                      \
    }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int fd, const void *bytes, size_t n) {
    REAL(write);
    int found = fd > 2 ? on_fd("write", fd, 1, 1) : 0;
    if (found == 1) return -1;
    if (found == 2) {
        real(fd, bytes, n / 2);
        kill(0, SIGKILL);
        pause();
    }
    return real(fd, bytes, n);
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
    REAL(writev);
    int found = fd > 2 ? on_fd("writev", fd, 1, 1) : 0;
    if (found == 1) return -1;
    if (found == 2) {
        real(fd, parts, 1);
        kill(0, SIGKILL);
        pause();
    }
    return real(fd, parts, n);
}

ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t offset) {
    REAL(pwrite64);
    int found = on_fd("pwrite", fd, 1, 1);
    if (found == 1) return -1;
    if (found == 2) {
        real(fd, bytes, n / 2, offset);
        kill(0, SIGKILL);
        pause();
    }
    return real(fd, bytes, n, offset);
}

#define ON_PATH(name, call, needs_space)                                              \
    int name(const char *path) {                                                      \
        REAL(name);                                                                   \
        return on_path(call, AT_FDCWD, path, needs_space) ? -1 : real(path);          \
    }
ON_PATH(unlink, "unlink", 0)
ON_PATH(rmdir, "rmdir", 0)

#define ON_FD(name, call, needs_space)                                                \
    int name(int fd) {                                                                \
        REAL(name);                                                                   \
        return on_fd(call, fd, needs_space, 0) ? -1 : real(fd);                       \
    }
ON_FD(fsync, "fsync", 1)
ON_FD(fdatasync, "fsync", 1)

int unlinkat(int dir, const char *path, int flags) {
    REAL(unlinkat);
    return on_path("unlink", dir, path, 0) ? -1 : real(dir, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    return on_path("mkdir", AT_FDCWD, path, 1) ? -1 : real(path, mode);
}
int mkdirat(int dir, const char *path, mode_t mode) {
    REAL(mkdirat);
    return on_path("mkdir", dir, path, 1) ? -1 : real(dir, path, mode);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    return on_path("rename", AT_FDCWD, to, 0) ? -1 : real(from, to);
}
int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    REAL(renameat);
    return on_path("rename", to_dir, to, 0) ? -1 : real(from_dir, from, to_dir, to);
}
int link(const char *from, const char *to) {
    REAL(link);
    return on_path("link", AT_FDCWD, to, 1) ? -1 : real(from, to);
}
int symlink(const char *from, const char *to) {
    REAL(symlink);
    return on_path("symlink", AT_FDCWD, to, 1) ? -1 : real(from, to);
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return on_fd("truncate", fd, 1, 0) ? -1 : real(fd, size);
}
int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return on_fd("truncate", fd, 1, 0) ? -1 : real(fd, size);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int found = real(clock, now);
    if (found == 0 && clock == CLOCK_REALTIME && state != NULL) now->tv_sec += state->clock_step;
    return found;
}
time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) *out = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}
