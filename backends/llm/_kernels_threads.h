/* Threads for the parts in C of this directory.
 *
 * The threads of torch take parts in turn: those of the OpenMP library that it has loaded. Threads of our own would
 * compete for the cores on which torch's threads still wait for its next operation.
 */

#include <stdint.h>
#ifdef __linux__
#include <dlfcn.h>
#endif

/* Work on fewer values takes less time than the other threads need to begin, so it is not shared. */
#define FEW_VALUES (1 << 15)

typedef struct Work {
    void (*compute)(const struct Work *work, int64_t part);
    int64_t num_parts, num_threads, next;
} Work;

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned) = NULL;

static void take_parts(void *argument)
{
    Work *work = argument;
    int64_t part;
    while ((part = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->num_parts)
        work->compute(work, part);
}

static void share(Work *work, int64_t num_values)
{
    const int64_t num_threads = work->num_threads < work->num_parts ? work->num_threads : work->num_parts;
    work->next = 0;
    if (num_threads > 1 && num_values > FEW_VALUES && gomp_parallel != NULL)
        gomp_parallel(take_parts, work, (unsigned)num_threads, 0);
    else
        take_parts(work);
}

/* Torch was imported before. Without its threads, one thread does everything. */
static void find_threads(void)
{
#ifdef __linux__
    *(void **)&gomp_parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
#endif
}
