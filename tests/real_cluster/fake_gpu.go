// fake-gpu FOLDER N [FILE...]: a device plugin that offers N devices named nvidia.com/gpu. Without device files there is
// nothing behind them; with files, as /dev/nvidia0, a container that asks for a device gets all of these files.
//
// Covers what scheduling needs: registration with the kubelet, a list of healthy devices, and the environment variable
// that tells a container which of them it was given. Does not cover health changes, nor files that differ by device.
package main

import (
	"context"
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const socket = "fake-gpu.sock"

type plugin struct {
	api.UnimplementedDevicePluginServer
	devices []*api.Device
	files   []*api.DeviceSpec
}

func (plugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{}, nil
}

func (p plugin) ListAndWatch(_ *api.Empty, stream api.DevicePlugin_ListAndWatchServer) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done() // the list never changes; an ended stream would mean that all devices are gone
	return nil
}

func (p plugin) Allocate(_ context.Context, request *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		visible := strings.Join(container.DevicesIds, ",")
		response.ContainerResponses = append(response.ContainerResponses,
			&api.ContainerAllocateResponse{Envs: map[string]string{"NVIDIA_VISIBLE_DEVICES": visible}, Devices: p.files})
	}
	return response, nil
}

func run(folder string, count int, files []string) error {
	path, kubeletPath := filepath.Join(folder, socket), filepath.Join(folder, "kubelet.sock")
	for { // a kubelet that starts empties the folder, then makes its socket
		if _, err := os.Stat(kubeletPath); err == nil {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	os.Remove(path)
	listener, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	served := plugin{}
	for i := range count {
		served.devices = append(served.devices, &api.Device{ID: fmt.Sprintf("GPU-fake-%d", i), Health: api.Healthy})
	}
	for _, file := range files {
		served.files = append(served.files, &api.DeviceSpec{ContainerPath: file, HostPath: file, Permissions: "rw"})
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, served)
	go server.Serve(listener)

	kubelet, err := grpc.NewClient("unix://"+kubeletPath,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer kubelet.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	_, err = api.NewRegistrationClient(kubelet).Register(ctx, &api.RegisterRequest{
		Version: api.Version, Endpoint: socket, ResourceName: "nvidia.com/gpu", Options: &api.DevicePluginOptions{},
	}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	log.Printf("offers %d devices", count)
	for { // a kubelet that has started again wants to be registered with anew
		if _, err := os.Stat(path); err != nil {
			return fmt.Errorf("the kubelet has started again: %w", err)
		}
		time.Sleep(time.Second)
	}
}

func main() {
	count, err := strconv.Atoi(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(run(os.Args[1], count, os.Args[3:])) // started again by its supervisor
}
