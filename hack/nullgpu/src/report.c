/* Who this process is, where it meets others, and what it waits for. */
#include <time.h>
#include <sys/stat.h>
#include "nullgpu.h"

const char *meetings(void) {
    const char *folder = getenv("NULLGPU_MEETINGS");
    if (!folder) folder = "/dev/shm/nullgpu";
    mkdir(folder, 0777);
    return folder;
}

int own_rank(void) {
    const char *rank = getenv("NULLGPU_RANK");
    if (!rank) rank = getenv("DOVETAIL_RANK");
    return rank ? atoi(rank) : current_device();
}

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

void report_wait(const char *sentence) {
    char path[4096], fresh[4200];
    snprintf(path, sizeof path, "%s/waits-%d", meetings(), own_rank());
    if (!sentence) {
        unlink(path);
        return;
    }
    snprintf(fresh, sizeof fresh, "%s.%d", path, getpid());
    FILE *file = fopen(fresh, "w");
    if (!file) return;
    fprintf(file, "rank %d %s\n", own_rank(), sentence);
    fclose(file);
    rename(fresh, path);
}
