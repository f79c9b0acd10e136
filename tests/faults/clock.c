/* A wall clock that is wrong by $CLOCK_OFFSET_S seconds, for LD_PRELOAD. Linux with glibc 2.30 or later.
 *
 * Deadlines on the wall clock that a program hands to the kernel are turned back, as they were made with the wrong
 * clock. Times of files stay right. */
#define _GNU_SOURCE
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const time_t LONGEST_UPTIME_S = 1000000000; /* a time after this is one of the wall clock */

static time_t offset_s(void) {
    static time_t known;
    static int is_known;
    if (!is_known) {
        const char *text = getenv("CLOCK_OFFSET_S");
        known = text ? atoll(text) : 0;
        is_known = 1;
    }
    return known;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += offset_s();
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

static clockid_t turn_back(const struct timespec *deadline, struct timespec *right) {
    *right = *deadline;
    if (deadline->tv_sec < LONGEST_UPTIME_S) return CLOCK_MONOTONIC;
    right->tv_sec -= offset_s();
    return CLOCK_REALTIME;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    struct timespec right;
    clockid_t clock = turn_back(deadline, &right);
    return pthread_cond_clockwait(condition, mutex, clock, &right);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    struct timespec right;
    clockid_t clock = turn_back(deadline, &right);
    return sem_clockwait(semaphore, clock, &right);
}
