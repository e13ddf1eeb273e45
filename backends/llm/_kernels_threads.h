/* Threads for the parts in C of this directory.
 *
 * The threads of torch take parts in turn: those of the OpenMP library that it has loaded. Threads of our own would
 * compete for the cores on which torch's threads still wait for its next operation.
 */

#include <stdint.h>
#ifdef __linux__
#include <dlfcn.h>
#include <sched.h>
#endif

/* Work on fewer values takes less time than the other threads need to begin, so it is not shared. */
#define FEW_VALUES (1 << 15)

#define MAX_RANGES 16

/* A range of parts in a line of the cache of its own. */
typedef struct {
    int64_t next, stop, gap[6];
} Range;

typedef struct Work {
    void (*compute)(const struct Work *work, int64_t part);
    int64_t num_parts, num_threads;
    struct Team *team; /* that the thread leads; NULL: none */
    int64_t num_ranges, num_begun;
    Range *ranges;
} Work;

/* Threads that stay together while one of them, which leads, shares one work after the other: to begin and end a parallel
 * region for each would take as long as a small product. Helpers look at `state`, whose halves are the number of the
 * work and, below, whether it is open to helpers and how many compute parts of it:
 *
 *     closed, 0 helpers -> open -> helpers come and go -> closed -> the last helper goes -> closed, 0 helpers
 *
 * The leader waits only for helpers that have come, so one that the system does not run holds nothing up. */
typedef struct Team {
    uint64_t state;
    Work *work;
    int64_t num_joined, is_over;
    void (*lead)(void *argument, struct Team *team);
    void *argument;
} Team;

#define OPEN ((uint64_t)1 << 31)
#define ONE_WORK ((uint64_t)1 << 32)
#define MANY_LOOKS 4096

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;

/* Each thread takes the parts of a range of its own in their order, since what it reads ahead is what follows in memory.
 * Then it takes what is left of the others'. */
static void take_parts(void *argument)
{
    Work *work = argument;
    const int64_t own = __atomic_fetch_add(&work->num_begun, 1, __ATOMIC_RELAXED);
    for (int64_t at = 0; at < work->num_ranges; at++) {
        Range *range = work->ranges + (own + at) % work->num_ranges;
        int64_t part;
        while ((part = __atomic_fetch_add(&range->next, 1, __ATOMIC_RELAXED)) < range->stop)
            work->compute(work, part);
    }
}

/* A moment of a thread that waits for another. */
static inline void wait_a_moment(int64_t num_looks)
{
#ifdef __linux__
    if (num_looks > MANY_LOOKS) {
        sched_yield();
        return;
    }
#endif
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
    (void)num_looks;
}

static void share_in_team(Team *team, Work *work)
{
    const uint64_t number = __atomic_load_n(&team->state, __ATOMIC_RELAXED) + ONE_WORK;
    team->work = work;
    __atomic_store_n(&team->state, number | OPEN, __ATOMIC_RELEASE);
    take_parts(work);
    __atomic_fetch_and(&team->state, ~OPEN, __ATOMIC_RELAXED);
    for (int64_t looks = 0; __atomic_load_n(&team->state, __ATOMIC_ACQUIRE) != number; looks++)
        wait_a_moment(looks);
}

static void share(Work *work, int64_t num_values)
{
    const int64_t num_threads = work->num_threads < work->num_parts ? work->num_threads : work->num_parts;
    if (num_threads <= 1 || num_values <= FEW_VALUES || gomp_parallel == NULL) {
        for (int64_t part = 0; part < work->num_parts; part++)
            work->compute(work, part);
        return;
    }
    Range ranges[MAX_RANGES];
    work->ranges = ranges;
    work->num_ranges = num_threads < MAX_RANGES ? num_threads : MAX_RANGES;
    work->num_begun = 0;
    for (int64_t at = 0; at < work->num_ranges; at++) {
        ranges[at].next = work->num_parts * at / work->num_ranges;
        ranges[at].stop = work->num_parts * (at + 1) / work->num_ranges;
    }
    if (work->team != NULL)
        share_in_team(work->team, work);
    else
        gomp_parallel(take_parts, work, (unsigned)num_threads, 0);
}

/* The first thread that comes leads. */
static inline void join_team(void *argument)
{
    Team *team = argument;
    if (__atomic_fetch_add(&team->num_joined, 1, __ATOMIC_RELAXED) == 0) {
        team->lead(team->argument, team);
        __atomic_store_n(&team->is_over, 1, __ATOMIC_RELEASE);
        return;
    }
    uint64_t seen = 0;
    for (int64_t looks = 0; !__atomic_load_n(&team->is_over, __ATOMIC_ACQUIRE); looks++) {
        uint64_t state = __atomic_load_n(&team->state, __ATOMIC_RELAXED);
        if (!(state & OPEN) || state / ONE_WORK == seen ||
            !__atomic_compare_exchange_n(&team->state, &state, state + 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
            wait_a_moment(looks);
            continue;
        }
        take_parts(team->work);
        __atomic_fetch_sub(&team->state, 1, __ATOMIC_RELEASE);
        seen = state / ONE_WORK;
        looks = 0;
    }
}

/* Calls `lead` once, with a team of as many threads, or NULL where there is one thread only. */
static inline void lead_team(void (*lead)(void *argument, Team *team), void *argument, int64_t num_threads)
{
    Team team = {.lead = lead, .argument = argument};
    if (num_threads > 1 && gomp_parallel != NULL)
        gomp_parallel(join_team, &team, (unsigned)num_threads, 0);
    else
        lead(argument, NULL);
}

/* Torch was imported before. Without its threads, one thread does everything. */
static void find_threads(void)
{
#ifdef __linux__
    *(void **)&gomp_parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#endif
}
