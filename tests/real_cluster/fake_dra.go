// fake-dra KUBECONFIG NODE FOLDER: a driver for dynamic resource allocation of four GPUs, behind which there is nothing.
//
// Covers what scheduling needs: a ResourceSlice whose devices have memory and a compute capability, as those of NVIDIA's
// driver have; registration with the kubelet, whose root folder is FOLDER; and claims that the kubelet prepares and
// unprepares, each with a line on the standard output. Does not cover device files: containers get none.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	v1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/ptr"
)

const name = "gpu.nvidia.com"

type driver struct{}

func (driver) PrepareResourceClaims(_ context.Context, claims []*v1.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	prepared := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		var devices []kubeletplugin.Device
		for _, result := range claim.Status.Allocation.Devices.Results {
			devices = append(devices, kubeletplugin.Device{
				Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device})
			fmt.Printf("prepared %s for %s/%s\n", result.Device, claim.Namespace, claim.Name)
		}
		prepared[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return prepared, nil
}

func (driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	done := map[types.UID]error{}
	for _, claim := range claims {
		fmt.Printf("unprepared %s/%s\n", claim.Namespace, claim.Name)
		done[claim.UID] = nil
	}
	return done, nil
}

func (driver) HandleError(_ context.Context, err error, message string) {
	log.Printf("%s: %v", message, err)
}

// Two GPUs of 80 GiB and two of 40 GiB.
func gpus() (devices []v1.Device) {
	for number := range 4 {
		memory, capability := "80Gi", "9.0.0"
		if number >= 2 {
			memory, capability = "40Gi", "8.0.0"
		}
		devices = append(devices, v1.Device{
			Name: fmt.Sprintf("gpu-%d", number),
			Attributes: map[v1.QualifiedName]v1.DeviceAttribute{
				"type":                  {StringValue: ptr.To("gpu")},
				"cudaComputeCapability": {VersionValue: ptr.To(capability)},
			},
			Capacity: map[v1.QualifiedName]v1.DeviceCapacity{"memory": {Value: resource.MustParse(memory)}},
		})
	}
	return
}

func run(kubeconfig, node, folder string) error {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(folder, "plugins", name)
	if err := os.MkdirAll(data, 0o750); err != nil {
		return err
	}
	ctx := context.Background()
	helper, err := kubeletplugin.Start(ctx, driver{}, kubeletplugin.DriverName(name), kubeletplugin.NodeName(node),
		kubeletplugin.KubeClient(client), kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(folder, "plugins_registry")))
	if err != nil {
		return err
	}
	defer helper.Stop()
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: gpus()}}}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{node: pool}}); err != nil {
		return err
	}
	select {}
}

func main() {
	if len(os.Args) != 4 {
		log.Fatal("fake-dra KUBECONFIG NODE FOLDER")
	}
	log.Fatal(run(os.Args[1], os.Args[2], os.Args[3]))
}
