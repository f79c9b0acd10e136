/* A small internet for benchmarks: nodes with access links of a given rate, a long way between them, loss.
 *
 *   wan RATE_MBIT RTT_MS LOSS_PERCENT QUEUE_KB NAMESPACE...
 *
 * makes an interface wan0 in each namespace (give them addresses 10.77.0.1, 10.77.0.2, ... in order) and carries IPv4
 * packets between them until it is ended: through the sender's access link, half the round trip, and the receiver's
 * access link; a full queue drops. Real TCP stacks stand on both sides, so windows and round trips act. Says "up".
 * Segments of up to 64 KB pass in one piece, as network cards let them, unless packets are to be lost one by one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST_NODES = 32, FRAME = 70000, HEADERS = 40, ETHERNET = 14 + 24, READS = 32 };

struct packet {
    struct packet *next;
    double due_s, takes_s;
    int to, size;
    char bytes[];
};

struct queue {
    struct packet *first, **last;
};

struct node {
    int tun;
    double up_free_s, down_free_s;
    struct queue away, arriving; /* on the long way from this node; in the access link to it */
};

static struct node nodes[MOST_NODES];
static int count;
static double bytes_per_s, way_s, loss, queue_bytes;
static uint64_t seed = 88172645463325252ull;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double chance(void) { /* xorshift: the same losses in every run */
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (double)(seed >> 11) / 9007199254740992.0;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int open_tun(const char *name_space, int offloads) {
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", name_space);
    int there = open(path, O_RDONLY);
    if (there < 0 || setns(there, CLONE_NEWNET) != 0) fail(path);
    close(there);
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {0};
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    strcpy(request.ifr_name, "wan0");
    if (tun < 0 || ioctl(tun, TUNSETIFF, &request) != 0) fail("/dev/net/tun");
    int header = sizeof(struct virtio_net_hdr);
    if (ioctl(tun, TUNSETVNETHDRSZ, &header) != 0) fail("TUNSETVNETHDRSZ");
    if (offloads && ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) fail("TUNSETOFFLOAD");
    return tun;
}

/* Bytes that it takes on the wire, cut into segments. */
static double wire_bytes(const char *frame, int size) {
    const struct virtio_net_hdr *header = (const void *)frame;
    int payload = size - (int)sizeof *header, segments = 1;
    if (header->gso_size > 0) segments = (payload - HEADERS + header->gso_size - 1) / header->gso_size;
    return payload + (segments - 1) * HEADERS + segments * ETHERNET;
}

static void append(struct queue *queue, struct packet *packet) {
    packet->next = NULL;
    *queue->last = packet;
    queue->last = &packet->next;
}

static struct packet *take(struct queue *queue) {
    struct packet *packet = queue->first;
    queue->first = packet->next;
    if (queue->first == NULL) queue->last = &queue->first;
    return packet;
}

/* When a packet that comes now has passed a link that is free at *free_s; negative: the queue is full. */
static double pass(double *free_s, double now, double takes_s) {
    if (*free_s < now) *free_s = now;
    if (*free_s - now > queue_bytes / bytes_per_s) return -1;
    return *free_s += takes_s;
}

static void send_off(struct node *from, const char *frame, int size) {
    const unsigned char *ip = (const unsigned char *)frame + sizeof(struct virtio_net_hdr);
    int to = ip[19] - 1;
    if (ip[0] >> 4 != 4 || to < 0 || to >= count) return;
    if (loss > 0 && chance() < loss) return;
    double takes_s = wire_bytes(frame, size) / bytes_per_s, gone_s = pass(&from->up_free_s, now_s(), takes_s);
    if (gone_s < 0) return;
    struct packet *packet = malloc(sizeof *packet + (size_t)size);
    if (packet == NULL) fail("malloc");
    *packet = (struct packet){.due_s = gone_s + way_s, .takes_s = takes_s, .to = to, .size = size};
    memcpy(packet->bytes, frame, (size_t)size);
    append(&from->away, packet);
}

/* Puts what has come the long way, first come first, into the access links of those it is for. */
static void arrive(double until_s) {
    for (;;) {
        struct node *earliest = NULL;
        for (struct node *node = nodes; node < nodes + count; ++node)
            if (node->away.first != NULL && (earliest == NULL || node->away.first->due_s < earliest->away.first->due_s))
                earliest = node;
        if (earliest == NULL || earliest->away.first->due_s > until_s) return;
        struct packet *packet = take(&earliest->away);
        struct node *to = &nodes[packet->to];
        packet->due_s = pass(&to->down_free_s, packet->due_s, packet->takes_s);
        if (packet->due_s < 0)
            free(packet);
        else
            append(&to->arriving, packet);
    }
}

/* Hands over what is due; gives when something is due next. */
static double deliver(double until_s) {
    double next_s = until_s + 1;
    arrive(until_s);
    for (struct node *node = nodes; node < nodes + count; ++node) {
        while (node->arriving.first != NULL && node->arriving.first->due_s <= until_s) {
            struct packet *packet = take(&node->arriving);
            if (write(node->tun, packet->bytes, (size_t)packet->size) < 0 && errno == EBADF) fail("write");
            free(packet);
        }
        if (node->arriving.first != NULL && node->arriving.first->due_s < next_s) next_s = node->arriving.first->due_s;
        if (node->away.first != NULL && node->away.first->due_s < next_s) next_s = node->away.first->due_s;
    }
    return next_s;
}

int main(int argc, char **argv) {
    if (argc < 7 || argc - 5 > MOST_NODES) {
        fprintf(stderr, "usage: wan RATE_MBIT RTT_MS LOSS_PERCENT QUEUE_KB NAMESPACE NAMESPACE...\n");
        return 2;
    }
    bytes_per_s = atof(argv[1]) * 1e6 / 8;
    way_s = atof(argv[2]) / 2e3;
    loss = atof(argv[3]) / 100;
    queue_bytes = atof(argv[4]) * 1024;
    int home = open("/proc/self/ns/net", O_RDONLY);
    struct pollfd waits[MOST_NODES];
    for (; count < argc - 5; ++count) {
        nodes[count].tun = open_tun(argv[5 + count], loss == 0);
        nodes[count].away.last = &nodes[count].away.first;
        nodes[count].arriving.last = &nodes[count].arriving.first;
        waits[count] = (struct pollfd){nodes[count].tun, POLLIN, 0};
    }
    setns(home, CLONE_NEWNET);
    puts("up");
    fflush(stdout);
    static char frame[FRAME];
    for (;;) {
        double next_s = deliver(now_s()), left_s = next_s - now_s();
        if (left_s > 0) {
            struct timespec wait = {(time_t)left_s, (long)((left_s - (double)(time_t)left_s) * 1e9)};
            ppoll(waits, (nfds_t)count, &wait, NULL);
        }
        for (int i = 0; i < count; ++i)
            for (int n = 0; n < READS; ++n) {
                ssize_t size = read(nodes[i].tun, frame, sizeof frame);
                if (size <= (ssize_t)sizeof(struct virtio_net_hdr)) break;
                send_off(&nodes[i], frame, (int)size);
            }
    }
}
