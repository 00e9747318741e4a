package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// gpus offers so many GPUs that are not there: a pod that is given some finds their names in NVIDIA_VISIBLE_DEVICES.
type gpus struct {
	api.UnimplementedDevicePluginServer
	devices []*api.Device
}

func (g *gpus) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (g *gpus) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: g.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

func (g *gpus) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerAllocateResponse{
			Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": strings.Join(container.DevicesIds, ",")},
		})
	}
	return response, nil
}

// devicePlugin serves until it is told to stop, and registers anew whenever the kubelet's socket is another one.
func devicePlugin() {
	resource := flag.String("resource", "nvidia.com/gpu", "name of the extended resource")
	count := flag.Int("count", 8, "GPUs to offer")
	folder := flag.String("folder", strings.TrimSuffix(api.DevicePluginPath, "/"), "the kubelet's device-plugin folder")
	flag.Parse()

	plugin := &gpus{}
	for i := range *count {
		plugin.devices = append(plugin.devices, &api.Device{ID: fmt.Sprintf("GPU-%d", i), Health: api.Healthy})
	}
	stop, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	for stop.Err() == nil {
		if err := serveOnce(stop, plugin, *resource, *folder); err != nil {
			log.Printf("%v; trying again", err)
		}
		select {
		case <-stop.Done():
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// serveOnce returns when the kubelet that it registered with is gone. A kubelet that starts empties the folder.
func serveOnce(stop context.Context, plugin *gpus, resource, folder string) error {
	kubelet := filepath.Join(folder, filepath.Base(api.KubeletSocket))
	before, err := os.Stat(kubelet)
	if err != nil {
		return fmt.Errorf("waiting for the kubelet: %w", err)
	}
	endpoint := "dovetail-gpu.sock"
	path := filepath.Join(folder, endpoint)
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, plugin)
	go server.Serve(listener) //nolint:errcheck // ends with Stop below
	defer server.Stop()

	if err := register(stop, kubelet, endpoint, resource); err != nil {
		return err
	}
	log.Printf("registered %d of %s", len(plugin.devices), resource)
	for {
		select {
		case <-stop.Done():
			return nil
		case <-time.After(500 * time.Millisecond):
		}
		now, err := os.Stat(kubelet)
		if err != nil || !os.SameFile(before, now) {
			return fmt.Errorf("the kubelet has restarted")
		}
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("the kubelet has removed our socket")
		}
	}
}

func register(ctx context.Context, kubelet, endpoint, resource string) error {
	connection, err := grpc.NewClient("unix://"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	deadline, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(connection).Register(deadline, &api.RegisterRequest{
		Version: api.Version, Endpoint: endpoint, ResourceName: resource,
	})
	return err
}
