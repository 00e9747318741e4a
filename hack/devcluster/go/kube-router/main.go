// kube-router's controller of NetworkPolicies, and nothing else of it: pods keep the network that they have.
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cloudnativelabs/kube-router/pkg/controllers/netpol"
	"github.com/cloudnativelabs/kube-router/pkg/healthcheck"
	"github.com/cloudnativelabs/kube-router/pkg/options"
	core "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	node := flag.String("node", "", "the node that stands for all")
	address := flag.String("address", "", "its InternalIP")
	services := flag.String("services", "", "the addresses of Services")
	flag.Parse()

	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		log.Fatal(err)
	}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	client := kubernetes.NewForConfigOrDie(config)
	watches := informers.NewSharedInformerFactory(client, 0)
	pods := watches.Core().V1().Pods().Informer()
	policies := watches.Networking().V1().NetworkPolicies().Informer()
	namespaces := watches.Core().V1().Namespaces().Informer()
	// The controller looks after the pods of one node. Here all nodes share a network namespace, and so their rules.
	if err := pods.SetTransform(func(thing interface{}) (interface{}, error) {
		if pod, ok := thing.(*core.Pod); ok && pod.Status.HostIP != "" {
			pod.Status.HostIP = *address
		}
		return thing, nil
	}); err != nil {
		log.Fatal(err)
	}
	watches.Start(stop.Done())
	watches.WaitForCacheSync(stop.Done())

	settings := options.NewKubeRouterConfig()
	settings.HostnameOverride = *node
	settings.ClusterIPCIDR = *services
	settings.IPTablesSyncPeriod = 5 * time.Minute
	controller, err := netpol.NewNetworkPolicyController(client, settings, pods, policies, namespaces, &sync.Mutex{})
	if err != nil {
		log.Fatal(err)
	}
	pods.AddEventHandler(controller.PodEventHandler)
	policies.AddEventHandler(controller.NetworkPolicyEventHandler)
	namespaces.AddEventHandler(controller.NamespaceEventHandler)

	beats := make(chan *healthcheck.ControllerHeartbeat, 10)
	go func() {
		for range beats {
		}
	}()
	var running sync.WaitGroup
	running.Add(1)
	controller.Run(beats, stop.Done(), &running)
	running.Wait()
	controller.Cleanup()
}
